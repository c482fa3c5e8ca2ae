"""Paper C's trade-off as a study: seconds of all-reduces by size, algorithm, library and group."""
