"""The reasons for which claims are pending."""
