"""What every run needs apart from model, data and trainer."""
