/* Runs an exported policy in C, without Python: `sebulba export RUN --to onnx`.

   gcc -O2 run_policy.c -o run_policy -ldl
   ./run_policy libonnxruntime.so policy.onnx 4 int32 1

   It reads observations of 4 numbers from standard input, as many as there are, and prints an action of
   one int32 for each. `policy.json` has these sizes and types: the observation is the input `obs`,
   [1, 4] of float32, the action is the output `action`, [1] of int32 (a choice), or [1, n] of float32.
   A policy that remembers has more inputs; they are made like this one, and get in the next step what
   `carried` in policy.json says.

   libonnxruntime.so is in the wheel of onnxruntime, which has no headers. Its interface is a table of
   functions that only ever grows, so those that are needed are declared here by their places in it. */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Status Status; /* NULL where all is well */
typedef struct {
  const void *const *(*table)(uint32_t version);
  const char *(*version)(void);
} ApiBase;

enum { VERSION = 1 }; /* of the table: all that is used here is in the first */
enum { ERROR_MESSAGE = 2, NEW_ENV = 3, NEW_SESSION = 7, RUN = 9, NEW_OPTIONS = 10 };
enum { ONE_THREAD = 24, NEW_TENSOR = 49, NEW_MEMORY = 69 };
enum { FLOAT32 = 1, INT32 = 6 }; /* types of elements */
enum { WARNINGS = 2, ARENA = 1, DEFAULT_MEMORY = 0 };

static const void *const *api;

static void check(Status *status) {
  if (status == NULL) return;
  const char *(*message)(const Status *) = api[ERROR_MESSAGE];
  fprintf(stderr, "onnxruntime: %s\n", message(status));
  exit(1);
}

static void fail(const char *what, const char *why) {
  fprintf(stderr, "%s: %s\n", what, why);
  exit(2);
}

static void load(const char *library) {
  void *opened = dlopen(library, RTLD_NOW);
  if (opened == NULL) fail("the library cannot be loaded", dlerror());
  const ApiBase *(*base)(void) = (const ApiBase *(*)(void))dlsym(opened, "OrtGetApiBase");
  if (base == NULL) fail(library, "is no library of onnxruntime");
  api = base()->table(VERSION);
  if (api == NULL) fail(library, "does not have version 1 of its interface");
}

static void *session_of(const char *model) {
  void *env, *options, *session;
  Status *(*new_env)(int, const char *, void **) = api[NEW_ENV];
  Status *(*new_options)(void **) = api[NEW_OPTIONS];
  Status *(*set_threads)(void *, int) = api[ONE_THREAD];
  Status *(*new_session)(void *, const char *, void *, void **) = api[NEW_SESSION];
  check(new_env(WARNINGS, "policy", &env));
  check(new_options(&options));
  check(set_threads(options, 1)); /* a small network is slower in several */
  check(new_session(env, model, options, &session));
  return session;
}

/* A tensor of memory that is ours: nothing is allocated from step to step. */
static void *tensor(void *data, const int64_t *shape, size_t dimensions, int64_t count, int type) {
  void *memory, *made;
  Status *(*new_memory)(int, int, void **) = api[NEW_MEMORY];
  Status *(*new_tensor)(void *, void *, size_t, const int64_t *, size_t, int, void **) =
      api[NEW_TENSOR];
  check(new_memory(ARENA, DEFAULT_MEMORY, &memory));
  check(new_tensor(memory, data, (size_t)count * 4, shape, dimensions, type, &made));
  return made;
}

int main(int argc, char **argv) {
  if (argc != 6) fail("usage", "run_policy LIBRARY MODEL OBS_SIZE int32|float32 ACTION_SIZE");
  int64_t num_obs = atoll(argv[3]), num_actions = atoll(argv[5]);
  int is_choice = strcmp(argv[4], "int32") == 0;
  if (num_obs < 1 || num_actions < 1) fail("usage", "OBS_SIZE and ACTION_SIZE are at least 1");
  load(argv[1]);
  void *session = session_of(argv[2]);

  float *obs = calloc((size_t)num_obs, sizeof *obs);
  void *action = calloc((size_t)num_actions, 4); /* of int32 or float32 */
  if (obs == NULL || action == NULL) fail("memory", "there is not enough");
  int64_t obs_shape[] = {1, num_obs}, action_shape[] = {1, num_actions};
  /* One choice is [1], without a second dimension. */
  size_t action_dimensions = is_choice && num_actions == 1 ? 1 : 2;
  void *input = tensor(obs, obs_shape, 2, num_obs, FLOAT32);
  void *output =
      tensor(action, action_shape, action_dimensions, num_actions, is_choice ? INT32 : FLOAT32);

  const char *input_names[] = {"obs"}, *output_names[] = {"action"};
  Status *(*run)(void *, void *, const char **, void **, size_t, const char **, size_t, void **) =
      api[RUN];
  for (;;) {
    for (int64_t i = 0; i < num_obs; i++)
      if (scanf("%f", &obs[i]) != 1) return i == 0 ? 0 : 1;
    check(run(session, NULL, input_names, &input, 1, output_names, 1, &output));
    for (int64_t i = 0; i < num_actions; i++) {
      char end = i + 1 < num_actions ? ' ' : '\n';
      if (is_choice)
        printf("%d%c", ((int32_t *)action)[i], end);
      else
        printf("%.9g%c", ((float *)action)[i], end);
    }
  }
}
