"""Hypothesis on machines that also do something else: no deadlines, and slow generation is no fault of a test."""

from hypothesis import HealthCheck, settings

settings.register_profile("flowtrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flowtrain")
