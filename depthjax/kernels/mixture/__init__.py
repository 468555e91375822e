"""One query mixes depth sources: the read of Attention Residuals, forward and backward."""
