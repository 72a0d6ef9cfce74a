"""From counted bytes to calibrated time: readers of profilers' exports, the fit, and how good each number is."""
