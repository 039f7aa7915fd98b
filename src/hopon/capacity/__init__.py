"""How much load a deployment carries while users still get what was promised: promises, search, targets, report."""
