"""clef_trt: compiled Clef decisions. See `Clef`."""

from .clef import Clef
from .errors import (
    BundleError,
    ClefError,
    EngineError,
    ExportError,
    Fault,
    MissingExtraError,
    ReleaseError,
    RequestError,
    SettingError,
    TooLongError,
    VerificationError,
)
from .types import Encoding, Limits

__version__ = "0.1.0"
__all__ = [
    "BundleError",
    "Clef",
    "ClefError",
    "Encoding",
    "EngineError",
    "ExportError",
    "Fault",
    "Limits",
    "MissingExtraError",
    "ReleaseError",
    "RequestError",
    "SettingError",
    "TooLongError",
    "VerificationError",
]
