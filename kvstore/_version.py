"""The version of this release, and its only definition."""

__version__ = "0.1.0"
