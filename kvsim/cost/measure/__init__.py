"""Measuring kernel classes: which shapes (shapes), on which device (cpu, gpu), in what order (rounds), or by a profiler (recipe)."""
