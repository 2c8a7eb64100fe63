"""JAX arrays on the CPU whose memory was allocated by XLA and not written.

JAX has no such array: `jnp.empty` and `lax.empty` write zeros. A custom call has its result allocated and may leave it
as it is, so this one does nothing. It is a C function of `ctypes`, with the part of XLA's FFI that it needs: XLA calls
it once for the version of that interface, then as often as the program runs.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import jax
from jax import jit as jax_jit

from dflow.tracing.ir.types import ArrayType

_NAME = "dflow_unfilled"
#: The type of the extension of a call that asks for the version, `XLA_FFI_Extension_Metadata`.
_METADATA = 1


class _FfiExtension(ctypes.Structure):
    """`XLA_FFI_Extension_Base`, and the pointer that follows it in `XLA_FFI_Metadata_Extension`."""


_FfiExtension._fields_ = [
    ("struct_size", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("next", ctypes.POINTER(_FfiExtension)),
    ("metadata", ctypes.c_void_p),
]


class _FfiVersion(ctypes.Structure):
    """`XLA_FFI_Api_Version`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _HandlerMetadata(ctypes.Structure):
    """The first fields of `XLA_FFI_Metadata`, and those of `XLA_FFI_FfiApi`."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _FfiVersion))


class _FfiApi(ctypes.Structure):
    """The first fields of `XLA_FFI_FfiApi`."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p), ("version", _FfiVersion))


class _CallFrame(ctypes.Structure):
    """The first fields of `XLA_FFI_CallFrame`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_FfiExtension)),
        ("api", ctypes.POINTER(_FfiApi)),
    )


def _leave(call: Any) -> None:
    """Leave the result as it is. Asked for the version, answer with XLA's own: only fields that all have are used."""
    extension = call.contents.extension
    if extension and extension.contents.type == _METADATA:
        answer = _HandlerMetadata.from_address(extension.contents.metadata).version
        own = call.contents.api.contents.version
        answer.major, answer.minor = own.major, own.minor


_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))(_leave)


@cache
def _register() -> None:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = make(ctypes.cast(_HANDLER, ctypes.c_void_p).value, None, None)
    jax.ffi.register_ffi_target(_NAME, capsule, platform="cpu")


def unfilled(type: ArrayType) -> jax.Array:
    """Return an array of a type, on the first CPU, with any values."""
    _register()
    made: jax.Array = jax_jit(jax.ffi.ffi_call(_NAME, type.struct))()
    return made
