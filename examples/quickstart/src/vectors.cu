// One value after the other. Each operation exists for float, double and int.

namespace vectors {

#define BINARY(Name, expression) \
    struct Name { \
        template <class T> static __device__ T of(T a, T b) { return expression; } \
    };
BINARY(Add, a + b)
BINARY(Subtract, a - b)
BINARY(Multiply, a *b)
BINARY(Divide, b == T(0) ? T(0) : a / b)
BINARY(Minimum, a < b ? a : b)
BINARY(Maximum, a < b ? b : a)

#define UNARY(Name, expression) \
    struct Name { \
        template <class T> static __device__ T of(T x) { return expression; } \
    };
UNARY(Negate, -x)
UNARY(Absolute, x < T(0) ? -x : x)
UNARY(Relu, x < T(0) ? T(0) : x)
UNARY(Root, T(sqrt(double(x))))
UNARY(Exp, exp(x))
UNARY(Log, log(x))
UNARY(Sine, sin(x))
UNARY(Cosine, cos(x))
UNARY(Tangent, tan(x))
UNARY(Tanh, tanh(x))
UNARY(Sigmoid, T(1) / (T(1) + exp(-x)))
UNARY(Gelu, x * (T(1) + erf(x * T(0.70710678118654752))) / T(2))

template <class Operation, class T>
__global__ void binary(const T *a, const T *b, T *out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = Operation::of(a[i], b[i]);
}

template <class Operation, class T>
__global__ void unary(const T *values, T *out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = Operation::of(values[i]);
}

template <class T>
__global__ void scale(const T *values, T factor, T *out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = values[i] * factor;
}

template <class T>
__global__ void clamp(const T *values, T low, T high, T *out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = values[i] < low ? low : values[i] > high ? high : values[i];
}

#define INSTANTIATE_BINARY(Name, T) template __global__ void binary<Name, T>(const T *, const T *, T *, int);
#define INSTANTIATE_UNARY(Name, T) template __global__ void unary<Name, T>(const T *, T *, int);
#define INSTANTIATE(T) \
    INSTANTIATE_BINARY(Add, T) INSTANTIATE_BINARY(Subtract, T) INSTANTIATE_BINARY(Multiply, T) \
    INSTANTIATE_BINARY(Divide, T) INSTANTIATE_BINARY(Minimum, T) INSTANTIATE_BINARY(Maximum, T) \
    INSTANTIATE_UNARY(Negate, T) INSTANTIATE_UNARY(Absolute, T) INSTANTIATE_UNARY(Relu, T) \
    template __global__ void scale<T>(const T *, T, T *, int); \
    template __global__ void clamp<T>(const T *, T, T, T *, int);
#define INSTANTIATE_REAL(T) \
    INSTANTIATE(T) INSTANTIATE_UNARY(Root, T) INSTANTIATE_UNARY(Exp, T) INSTANTIATE_UNARY(Log, T) \
    INSTANTIATE_UNARY(Sine, T) INSTANTIATE_UNARY(Cosine, T) INSTANTIATE_UNARY(Tangent, T) \
    INSTANTIATE_UNARY(Tanh, T) INSTANTIATE_UNARY(Sigmoid, T) INSTANTIATE_UNARY(Gelu, T)
INSTANTIATE_REAL(float)
INSTANTIATE_REAL(double)
INSTANTIATE(int)

}  // namespace vectors
