"""Paper B reproduced: five strategies and two models, measured and predicted."""
