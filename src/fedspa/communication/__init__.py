"""What travels between the server and its clients, and how it is encoded."""
