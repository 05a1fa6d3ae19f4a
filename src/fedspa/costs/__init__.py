"""Training costs: FLOPs and bytes, in exact integers."""
