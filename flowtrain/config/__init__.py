"""Configuration of a run: pydantic models, one file per role; ``run.py`` joins them and checks across roles."""
