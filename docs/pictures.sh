# The commands of the pictures that the pages on design and measurements show, and of those of schedules.
# python docs/make_pictures.py [--runs] docs/pictures.sh runs them.

titanlite train configs/pp2_tp2.toml \
    --model.num_layers=8 --model.dim=384 --model.num_heads=6 --model.ffn_hidden_dim=1024 \
    --parallelism.pipeline_parallel_microbatch_size=4 --training.steps=5 --validation.enable=false \
    --profiling.enable_pipeline_timeline=true --profiling.profile_freq=5 --sampling.num_samples=0 \
    --job.dump_folder=outputs/real_1f1b
cp outputs/real_1f1b/profile_traces/pipeline_step_5.svg docs/images/pipeline_parallel/real_1f1b.svg
titanlite train configs/pp2_interleaved.toml \
    --model.num_layers=8 --model.dim=384 --model.num_heads=6 --model.ffn_hidden_dim=1024 \
    --parallelism.pipeline_parallel_microbatch_size=4 --training.steps=5 --validation.enable=false \
    --profiling.enable_pipeline_timeline=true --profiling.profile_freq=5 --sampling.num_samples=0 \
    --parallelism.pipeline_parallel_degree=4 \
    --job.dump_folder=outputs/real_interleaved1f1b
cp outputs/real_interleaved1f1b/profile_traces/pipeline_step_5.svg docs/images/pipeline_parallel/real_interleaved1f1b.svg
titanlite train configs/pp2_fsdp2.toml \
    --model.num_layers=8 --model.dim=384 --model.num_heads=6 --model.ffn_hidden_dim=1024 \
    --parallelism.pipeline_parallel_microbatch_size=4 --training.steps=5 --validation.enable=false \
    --profiling.enable_pipeline_timeline=true --profiling.profile_freq=5 --sampling.num_samples=0 \
    --parallelism.pipeline_parallel_schedule=ZBVZeroBubble \
    --job.dump_folder=outputs/real_zbvzerobubble
cp outputs/real_zbvzerobubble/profile_traces/pipeline_step_5.svg docs/images/pipeline_parallel/real_zbvzerobubble.svg

titanlite simulate GPipe --workers 4 --batches 8 \
    --compare 1F1B \
    --svg docs/images/pipeline_parallel/gpipe_1f1b.svg
titanlite simulate GPipe --workers 4 --batches 8 \
    --compare 1F1B LoopedBFS Interleaved1F1B InterleavedZeroBubble ZBV DualPipeV \
    --svg docs/images/pipeline_parallel/schedules.svg

titanlite train configs/pp2_interleaved.toml --training.steps=80 --validation.enable=false \
    --profiling.enable_pipeline_timeline=true --profiling.profile_freq=1 --sampling.num_samples=0 \
    --job.dump_folder=outputs/measured_interleaved
titanlite plan configs/pp2_interleaved.toml --hardware=cpu \
    --measured=outputs/measured_interleaved/profile_traces --svg=docs/images/plan/interleaved.svg
titanlite train configs/pp2_dualpipev.toml --training.steps=60 --validation.enable=false \
    --profiling.enable_pipeline_timeline=true --profiling.profile_freq=1 --sampling.num_samples=0 \
    --job.dump_folder=outputs/measured_dualpipev
titanlite plan configs/pp2_dualpipev.toml --hardware=cpu \
    --measured=outputs/measured_dualpipev/profile_traces --svg=docs/images/plan/dualpipev.svg
