"""Messages between the server and its clients, and their encoding."""
