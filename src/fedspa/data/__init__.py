"""Where images come from, which rows each client holds, and how batches are drawn."""
