"""Calibration of an attention cache: the recipe of `compress kv` and its search."""
