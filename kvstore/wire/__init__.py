"""The protobuf form of the control protocol; only this package imports ``kvstore.v1``."""
