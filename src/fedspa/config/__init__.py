"""From the composed config to a checked plan."""
