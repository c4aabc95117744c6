"""What a draft is before and while it trains, one file a kind."""
