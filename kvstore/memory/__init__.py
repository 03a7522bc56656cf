"""Memory that describes itself: headers, superblocks, segments in shared memory."""
