"""Side-by-side speed of servers over HTTP, and of hopon's parts."""
