"""The tests by kind, one folder each; what several kinds share lies beside this file."""
