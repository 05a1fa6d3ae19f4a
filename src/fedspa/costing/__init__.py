"""What training costs in FLOPs, bytes and time, in closed form and before it runs."""
