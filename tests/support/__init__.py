"""What tests of several kinds share, each once: processes, clusters, waiting, and so on."""
