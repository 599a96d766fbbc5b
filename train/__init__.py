"""Training: one visible loop, and the command line that ties the stages together. Kept free of imports: the command
line must answer at once."""
