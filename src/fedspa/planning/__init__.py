"""What a run would cost, and do, before it runs."""
