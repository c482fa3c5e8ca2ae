"""Scaling studies: from run folders to a report."""
