"""One program per library: `python -m workers.NAME`, spoken to as `workers.protocol` says."""
