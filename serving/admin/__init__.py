"""The routes of the operator: metrics, the page, the API description, health, sleeping; access log and traces."""
