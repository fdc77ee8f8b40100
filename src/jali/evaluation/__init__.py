"""What came of a run: quality, reports, inspection, benchmarks, the demo."""
