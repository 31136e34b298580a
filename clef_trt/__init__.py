"""clef_trt: compiled Clef decisions. See `Clef`."""

from .batch import PassLimits
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
from .media import MediaLimits
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
    "MediaLimits",
    "MissingExtraError",
    "PassLimits",
    "ReleaseError",
    "RequestError",
    "SettingError",
    "TooLongError",
    "VerificationError",
]
