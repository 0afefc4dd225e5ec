"""What is compared of the text of an error."""

from __future__ import annotations

import pytest

from pytest_negativa.session.outcome_recorder import describe_error


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("CUDA error: no kernel image is available", "CUDA error, no kernel image is available"),
        ("cuFuncLoad: CUDA_ERROR_NOT_FOUND", "CUDA_ERROR_NOT_FOUND"),
        ("cudaErrorInvalidDeviceFunction: invalid\ndevice function at 0x7f", "cudaErrorInvalid"),
        ("CUBLAS_STATUS_NOT_INITIALIZED when calling", "CUBLAS_STATUS_NOT_INITIALIZED"),
        ("named symbol not found", "symbol not found"),
    ],
)
def test_errors_of_cuda_are_named(text: str, named: str) -> None:
    assert describe_error(RuntimeError(text)).startswith(f"RuntimeError ({named}")


@pytest.mark.parametrize("text", ["", "at 0x7f00 in /tmp/pytest-12", "CUDA is not available"])
def test_other_words_are_not(text: str) -> None:
    assert describe_error(ValueError(text)) == "ValueError"


def test_causes_and_what_was_handled_count() -> None:
    try:
        try:
            raise OSError("CUDA_ERROR_NO_BINARY_FOR_GPU")
        except OSError:
            raise KeyError("a") from None
    except KeyError as e:
        assert describe_error(e) == "KeyError", "it was suppressed"
    cause = ValueError("b")
    cause.__cause__ = OSError("CUDA_ERROR_NO_BINARY_FOR_GPU")
    assert describe_error(cause) == "ValueError (CUDA_ERROR_NO_BINARY_FOR_GPU)"
