# A pretend training program: eight steps of the workload's lines, and processes that would outlive it.
bash -c 'sleep 600 & wait' > /dev/null 2>&1 & # elsewhere than the log: the supervisor would wait for its last words
for step in 0 1 2 3 4 5 6 7; do
  echo "tuner-step {\"step\": $step, \"seconds\": 0.$1$2$3, \"loss\": 3.0}"
done
sleep 0.1
exit 0
