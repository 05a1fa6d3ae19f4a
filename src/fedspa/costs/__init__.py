"""What training costs: FLOPs and bytes, in exact integers."""
