"""Launch files with another plan in place of theirs, as a diff."""

from tuner.checking.patching.patch import Patch, patch_of, version_of

__all__ = ["Patch", "patch_of", "version_of"]
