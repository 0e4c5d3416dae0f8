"""The version of the library, which files state that it writes."""

__version__ = "0.1.0"
