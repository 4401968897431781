"""The walk through decoder layers, one in memory at a time, and what every walk looks at."""
