"""The control protocol's protobuf form; the only place that sees generated code."""
