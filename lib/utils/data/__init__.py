"""From a dataset to a batch on the device."""
