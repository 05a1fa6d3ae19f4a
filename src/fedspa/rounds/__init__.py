"""A round: whom it visits, what a visit does and sends, how the updates are merged, what is tested."""
