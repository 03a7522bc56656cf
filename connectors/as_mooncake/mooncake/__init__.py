"""Replaces only ``store`` of Mooncake's package; other modules are those of the installed one."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
