/* SPDX-License-Identifier: Apache-2.0 */
/* The text of user.hitrain.optimizer: which texts are accepted, and the message for every other text. */
#include "optim/optim.h"
#include "tests/support/suite.h"

static struct ht_optim_config config;
static char err[HT_OPTIM_ERROR_MAX];

static int parse(const char *text)
{
    memset(err, 0, sizeof(err));
    return ht_optim_config_parse(text, strlen(text), &config, err);
}

TEST(words_left_out_have_the_defaults_of_torch)
{
    ck_assert_int_eq(parse("adamw"), 0);
    ck_assert(config.rule == HT_RULE_ADAMW && config.lr == 1e-3 && config.beta1 == 0.9 && config.beta2 == 0.999);
    ck_assert(config.eps == 1e-8 && config.weight_decay == 1e-2 && !config.maximize && !config.partial);
    ck_assert_uint_eq(config.durable_every, 1);
}

TEST(every_word_is_read)
{
    ck_assert_int_eq(
        parse("  adamw lr=3e-4\tbeta1=0 beta2=0.95 eps=0 weight_decay=0.1 durable_every=16 partial=1 maximize=1\n"), 0);
    ck_assert(config.lr == 3e-4 && config.beta1 == 0 && config.beta2 == 0.95 && config.eps == 0);
    ck_assert(config.weight_decay == 0.1 && config.maximize && config.partial);
    ck_assert_uint_eq(config.durable_every, 16);
    ck_assert(config.accumulate == 1 && !config.accumulate_mean);
    ck_assert_int_eq(parse("sgd accumulate=4 accumulate_mode=mean"), 0);
    ck_assert(config.accumulate == 4 && config.accumulate_mean);
    ck_assert_int_eq(parse("sgd state_bits=8 state_bits_min=0"), 0);
    ck_assert(config.state_bits == 8 && config.state_bits_min == 0);
    ck_assert_int_eq(parse("sgd accumulate_mode=sum"), 0);
    ck_assert(config.state_bits == 32 && config.state_bits_min == 4096);
    ck_assert(!config.accumulate_mean);
}

/* text, and the word that the message must contain */
static const char *const wrong[][2] = {
    {"", "empty"},
    {"  \n", "empty"},
    {"rmsprop lr=1", "\"rmsprop\" is not known; known: adamw adam sgd lion adagrad muon"},
    {"adamw2", "adamw2"},
    {"lr=1", "lr=1"},
    {"adamw momentum=0.9", "momentum=0.9"},
    {"adamw amsgrad=1", "amsgrad is not implemented"},
    {"adagrad initial_accumulator_value=1", "initial_accumulator_value is not implemented"},
    {"adamw betas=0.9,0.99", "beta1= and beta2="},
    {"sgd beta1=0.9", "beta1=0.9"},
    {"sgd nesterov=1", "needs momentum"},
    {"sgd nesterov=1 momentum=0.9 dampening=0.1", "needs momentum"},
    {"muon momentum=1", "< 1"},
    {"muon adjust_lr=other", "match_rms_adamw or spectral_unclamped"},
    {"muon muon_split=", "muon_split=: must be rows"},
    {"muon muon_split=8,", "muon_split=8,"},
    {"muon muon_split=8,0", "muon_split=8,0"},
    {"muon muon_split=8*", "muon_split=8*"},
    {"muon muon_split=8*0", "muon_split=8*0"},
    {"muon muon_split=-8", "muon_split=-8"},
    {"muon muon_split=1,2,3,4,5", "at most 4"},
    {"muon ns=gpu", "client or store"},
    {"muon ns_steps=0", "ns_steps=0"},
    {"muon beta1=0.9", "beta1=0.9"},
    {"sgd muon_split=8", "muon_split=8"},
    {"lion eps=1", "eps=1"},
    {"lion lr=1e30 weight_decay=1e30", "too large"},
    {"adamw lr", "\"lr\""},
    {"adamw =3", "=3"},
    {"adamw lr=", "lr="},
    {"adamw lr=fast", "lr=fast"},
    {"adamw lr=1x", "lr=1x"},
    {"adamw lr=nan", "lr=nan"},
    {"adamw lr=inf", "lr=inf"},
    {"adamw lr=1e999", "lr=1e999"},
    {"adamw lr=0x1p3", "lr=0x1p3"},
    {"adamw lr=-1", ">= 0"},
    {"adamw lr=1e39", "lr"},
    {"adamw beta1=1", "< 1"},
    {"adamw beta1=-0.1", "beta1"},
    {"adamw beta2=1.5", "beta2"},
    {"adamw eps=-1e-8", "eps"},
    {"adamw weight_decay=-1", "weight_decay"},
    {"adamw lr=1e30 weight_decay=1e30", "too large"},
    {"adamw durable_every=0", "durable_every"},
    {"adamw durable_every=1.5", "whole"},
    {"adamw durable_every=99999999", "durable_every"},
    {"adamw accumulate=0", "from 1 to 65536"},
    {"adamw accumulate=65537", "from 1 to 65536"},
    {"adamw accumulate_mode=average", "sum or mean"},
    {"adamw accumulate_mode=", "sum or mean"},
    {"adamw accumulate_mode=1", "sum or mean"},
    {"adamw state_bits=7", "32, 16 or 8"},
    {"adamw state_bits=8.5", "32, 16 or 8"},
    {"adamw state_bits=24", "32, 16 or 8"},
    {"adamw state_bits_min=-1", "from 0 to"},
    {"adamw partial=2", "0 or 1"},
    {"adamw partial=yes", "0 or 1"},
    {"adamw maximize=0.5", "0 or 1"},
    {"adamw lr=1 lr=2", "lr is given twice"},
    {"adamw \033[31m=1", "?[31m"},
};

TEST_LOOP(what_is_wrong_is_named, HT_ARRAY_SIZE(wrong))
{
    config.lr = 12345;
    ck_assert_int_eq(parse(wrong[_i][0]), -EINVAL);
    ck_assert_msg(strstr(err, wrong[_i][1]), "\"%s\": %s", wrong[_i][0], err);
    ck_assert(config.lr == 12345); /* nothing written */
}

static int amend(const char *text, const char *base_text)
{
    struct ht_optim_config base;

    ck_assert_int_eq(ht_optim_config_parse(base_text, strlen(base_text), &base, err), 0);
    return ht_optim_config_amend(text, strlen(text), &base, &config, err);
}

TEST(words_of_muon_are_read)
{
    ck_assert_int_eq(parse("muon"), 0);
    ck_assert(config.rule == HT_RULE_MUON && config.lr == 1e-3 && config.momentum == 0.95 && config.nesterov);
    ck_assert(config.weight_decay == 0.1 && config.adjust_lr == HT_MUON_ORIGINAL && !config.ns_store);
    ck_assert(config.ns_a == 3.4445 && config.ns_b == -4.775 && config.ns_c == 2.0315 && config.eps == 1e-7);
    ck_assert(config.ns_steps == 5 && !config.muon_split.count);
    ck_assert_int_eq(parse("muon adjust_lr=spectral_unclamped ns=store muon_split=4096,1024*2 nesterov=0"), 0);
    ck_assert(config.adjust_lr == HT_MUON_SPECTRAL_UNCLAMPED && config.ns_store && !config.nesterov);
    ck_assert(config.muon_split.count == 2 && config.muon_split.of[0].rows == 4096 &&
              config.muon_split.of[0].times == 1);
    ck_assert(config.muon_split.of[1].rows == 1024 && config.muon_split.of[1].times == 2);
    struct ht_optim_config base = config;
    ck_assert_int_eq(ht_optim_config_amend("muon_split=0", 12, &base, &config, err), 0);
    ck_assert(!config.muon_split.count && config.adjust_lr == HT_MUON_SPECTRAL_UNCLAMPED);
}

TEST(words_that_amend_leave_the_others_as_they_are)
{
    ck_assert_int_eq(amend("adamw weight_decay=0.5", "adamw lr=0.25 beta1=0.5 weight_decay=0 partial=1"), 0);
    ck_assert(config.lr == 0.25 && config.beta1 == 0.5 && config.weight_decay == 0.5 && config.partial);
    ck_assert_int_eq(amend("weight_decay=0.5", "AdamW lr=0.25"), 0);
    ck_assert(config.rule == HT_RULE_ADAMW && config.lr == 0.25 && config.weight_decay == 0.5);
    ck_assert_int_eq(amend("ADAMW", "adamw lr=0.25"), 0);
    ck_assert(config.lr == 0.25);
    /* Another rule has its own defaults; words that all rules have stay. */
    ck_assert_int_eq(amend("lion beta1=0.5", "adamw lr=0.25 weight_decay=0.125 maximize=1 accumulate=3"), 0);
    ck_assert(config.rule == HT_RULE_LION && config.beta1 == 0.5 && config.lr == 1e-4 && config.weight_decay == 0);
    ck_assert(config.maximize && config.accumulate == 3);
    ck_assert_int_eq(amend("beta1=0.5", "sgd"), -EINVAL);
    ck_assert_ptr_nonnull(strstr(err, "\"beta1=0.5\" is no word=value of sgd"));
    ck_assert_int_eq(amend("momentum=0", "sgd momentum=0.9 nesterov=1"), -EINVAL);
    ck_assert_int_eq(amend("momentum=0 nesterov=0", "sgd momentum=0.9 nesterov=1"), 0);
    ck_assert_int_eq(amend("", "sgd"), -EINVAL);
    ck_assert_int_eq(amend("rmsprop", "sgd"), -EINVAL);
}

TEST(words_are_told_as_they_are_read)
{
    static const char *const texts[] = {"sgd",
                                        "AdamW lr=0.1 beta2=0.3333333333333333 accumulate_mode=mean durable_every=7",
                                        "muon adjust_lr=match_rms_adamw muon_split=4096,1024*2 ns=store",
                                        "adam eps=1e-300",
                                        "lion maximize=1",
                                        "adagrad lr_decay=123456789"};
    struct ht_optim_config told;
    char text[HT_OPTIM_CONFIG_TEXT_MAX];

    for (size_t i = 0; i < HT_ARRAY_SIZE(texts); i++) {
        ck_assert_int_eq(parse(texts[i]), 0);
        ht_optim_config_text(&config, text, sizeof(text));
        ck_assert_int_eq(ht_optim_config_parse(text, strlen(text), &told, err), 0);
        ck_assert_mem_eq(&told, &config, sizeof(told));
    }
    ck_assert_int_eq(parse("sgd lr=0.1 accumulate=2 accumulate_mode=mean"), 0);
    ht_optim_config_text(&config, text, sizeof(text));
    ck_assert_str_eq(
        text,
        "sgd lr=0.1 weight_decay=0 momentum=0 dampening=0 nesterov=0 grad_scale=1 max_grad_norm=0 "
        "skip_nonfinite=0 durable_every=1 retain=0 retain_every=1 retain_must=0 accumulate=2 accumulate_mode=mean state_bits=32 state_bits_min=4096 redo_keep=0 redo=off delta=off delta_keep=8 delta_max=0.0625 delta_dtype=same partial=0 maximize=0");
    ht_optim_config_text(&config, text, 9);
    ck_assert_str_eq(text, "sgd lr=0");
}

TEST(deltas_have_bounds)
{
    static const char *const bad[] = {"sgd delta_keep=-1",  "sgd delta_keep=0",   "sgd delta_keep=129",
                                      "sgd delta_max=1.5",  "sgd delta_max=-0.1", "sgd delta=1",
                                      "sgd delta_dtype=f16"};

    for (size_t i = 0; i < HT_ARRAY_SIZE(bad); i++)
        ck_assert_int_eq(parse(bad[i]), -EINVAL);
    ck_assert_int_eq(parse("sgd"), 0);
    ck_assert(!config.delta && config.delta_keep == 8);
    ck_assert_int_eq(parse("sgd delta=on delta_keep=128 delta_max=1 delta_dtype=bf16"), 0);
    ck_assert(config.delta && config.delta_bf16 && config.delta_keep == 128 && config.delta_max == 1);
}

TEST(bytes_of_any_kind_are_safe)
{
    char text[HT_OPTIM_CONFIG_TEXT_MAX + 8];

    memset(text, 'x', sizeof(text));
    ck_assert_int_eq(ht_optim_config_parse(text, sizeof(text), &config, err), -EINVAL);
    ck_assert_int_eq(ht_optim_config_parse(text, HT_OPTIM_CONFIG_TEXT_MAX, &config, err), -EINVAL);
    ck_assert_int_eq(ht_optim_config_parse("adamw\0lr=1", 10, &config, err), -EINVAL);
    ck_assert_int_eq(ht_optim_config_parse("adamw lr=1\0", 11, &config, err), -EINVAL);
    /* A number longer than a message is no number, not a cut one. */
    memset(text, '0', sizeof(text));
    memcpy(text, "adamw lr=", 9);
    ck_assert_int_eq(ht_optim_config_parse(text, 200, &config, err), -EINVAL);
    for (unsigned i = 0; i < 256; i++) {
        char one[] = {'a', 'd', 'a', 'm', 'w', ' ', (char)i, '=', (char)(255 - i)};
        int rc = ht_optim_config_parse(one, sizeof(one), &config, err);
        ck_assert(rc == -EINVAL);
    }
}

RUN_TESTS("config")
