export HOME=$PWD/home OPENAI_BASE_URL=$ROSE_URL/v1 OPENAI_API_KEY=$ROSE_KEY OPENAI_MODEL=policy
mkdir -p "$HOME" work
cd work
exec qwen --auth-type openai --yolo -p "Look into a.txt"
