export HOME=$PWD/home OPENAI_API_BASE=$ROSE_URL/v1 OPENAI_API_KEY=$ROSE_KEY LITELLM_LOCAL_MODEL_COST_MAP=True
export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors MSWEA_SILENT_STARTUP=1
mkdir -p "$HOME" work
cd work
exec mini -m openai/policy -t "Look into a.txt" -y --exit-immediately
