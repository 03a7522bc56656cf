"""Of Mooncake's package only ``store`` is replaced; its other modules are found where it is
installed."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
