"""The structs of all bodies and answers, by API. Data only: they convert and decide nothing."""
