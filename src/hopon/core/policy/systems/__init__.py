"""Published batching systems, a page each: a preset per system, made of the parts beside this folder."""
