"""The version of this package, whether it is installed or only on the path."""

__version__ = "0.1.0"
