// An exception that passes through frames of this library, on threads.
#include <stdexcept>
#include <thread>

static int fail(int depth) {
    if (depth == 0) throw std::runtime_error("thrown");
    return fail(depth - 1) + depth;
}

extern "C" int catch_many(int count) {
    int caught = 0;
    std::thread thread([&] {
        for (int i = 0; i < count; i++) try { fail(5); } catch (const std::runtime_error &) { caught++; }
    });
    thread.join();
    return caught;
}
