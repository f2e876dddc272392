//! Proves that a store is safe before anyone trusts it.
