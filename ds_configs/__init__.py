"""Base configurations for DeepSpeed, one for each ZeRO stage; `engine.ds_config` names another."""
