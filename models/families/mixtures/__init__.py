"""Families with a mixture of experts since 2025, each with its dense sisters. They extend those one folder up."""
